"""The decoding loop (draft, score in one pass, keep what the target chose) and the interfaces it is built on."""
