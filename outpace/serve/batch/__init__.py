"""Batch jobs: files of requests that the server's own routes answer, without a port."""
