"""What attention is meant: dtypes, typed expressions, the operator table and `AttentionSpec`."""
