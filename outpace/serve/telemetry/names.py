"""The names of all metrics with what they count, and the buckets of histograms."""

from __future__ import annotations

OWN, ALIAS = "outpace:", "vllm:"
SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 600.0)
PASS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# Name -> what it counts. Prometheus shows counters with `_total`.
COUNTERS = {
    "spec_decode_num_drafts": "Passes with draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Tokens of prompts that the cache held already.",
    "generation_tokens": "Tokens of answers, as passes commit them.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the cache.",
    "prefix_cache_hits": "Tokens of prompts that were found in the cache.",
    "num_preemptions": "Samples that gave up their slot for a while because memory was full.",
}
# With the labels that each has besides those of all metrics.
LABELLED = {
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted draft tokens by their position in the draft.", ["position"]),
    "request_success": ("Samples that ended, by why.", ["finished_reason"]),
    "draft_tokens_by_source": ("Draft tokens by who drafted them.", ["source"]),
    "accepted_tokens_by_source": ("Accepted draft tokens by who drafted them.", ["source"]),
    "http_replies": ("Replies by path and status.", ["path", "status"]),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", SHORT),
    "inter_token_latency_seconds": ("Time between two passes that added to the same answer.", EACH),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of an answer.", EACH),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", LONG),
    "request_queue_time_seconds": ("From the arrival of a request to its slot.", LONG),
    "request_prefill_time_seconds": ("From the slot to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the end.", LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", TOKENS),
    "iteration_tokens_total": ("Tokens that a pass committed, with the prompts that it completed.", PASS),
}
GAUGES = {
    "num_requests_running": "Samples in the engine.",
    "num_requests_waiting": "Samples that wait.",
    "kv_cache_usage_perc": "Share of the KV cache that is in use, from 0 to 1.",
}
