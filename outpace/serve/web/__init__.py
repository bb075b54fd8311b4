"""Between HTTP and the service: access, events, errors."""
