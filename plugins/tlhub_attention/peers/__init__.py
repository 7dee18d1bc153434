"""What each kernel is measured against."""
