"""What each kernel computes: dims, arrays, options, and who proves it."""
