"""Copies of runs in an object store or on a shared disk, from which another machine resumes them."""
