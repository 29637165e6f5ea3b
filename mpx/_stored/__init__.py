"""The ways an optimizer state is kept between steps, and what each of its fields is."""
