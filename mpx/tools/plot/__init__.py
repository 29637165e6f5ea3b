"""The functions of `mpx.plot`, and the style sheet that they share."""
