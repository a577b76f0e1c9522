"""Fast paths: each replaces one seam of the reference path, and is proven equal to it by tests."""
