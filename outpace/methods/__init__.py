"""Drafting methods, one file each: what a method drafts, and its options."""
