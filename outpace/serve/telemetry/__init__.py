"""What a server tells of its work: metrics, figures of requests, a log."""
