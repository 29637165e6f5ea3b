"""What `mpx.doctor` looks at: the packages and devices here, what they compute, and how fast."""
