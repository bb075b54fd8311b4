"""Proof: does a method give what the model itself would have given? The checks behind `outpace verify`."""
