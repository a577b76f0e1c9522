"""A local web page that follows runs while they train."""
