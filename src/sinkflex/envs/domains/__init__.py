"""The embedded domains, one folder each."""
