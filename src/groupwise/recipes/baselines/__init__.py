"""What scores are compared with, besides the mean of the group."""
