"""The step of an optimizer, one kernel a leaf."""
