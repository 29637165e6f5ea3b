"""`advise`: which leaves and contractions need float32, found out by measurement."""
