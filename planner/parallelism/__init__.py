"""Who shards what: one file a technique, each the ideal of its paper."""
