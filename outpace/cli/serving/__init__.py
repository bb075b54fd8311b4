"""The commands that answer requests of APIs: a server, and files of requests."""
