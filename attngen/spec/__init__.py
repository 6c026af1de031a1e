"""What attention is meant: dtypes, typed expressions, the operator table and `AttentionSpec`."""

from attngen.spec import operators as operators  # fills the table
