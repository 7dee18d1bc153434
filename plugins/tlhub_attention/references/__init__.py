"""Each kernel in float64, and its tolerance."""
