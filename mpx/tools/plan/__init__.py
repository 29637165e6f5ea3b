"""What a training holds, counted before anything is allocated."""
