"""The APIs: one file of fields and one of translation for each."""
