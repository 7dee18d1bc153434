"""Products of narrow types on the tensor cores of sm_80 and newer."""
