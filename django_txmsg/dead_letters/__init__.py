"""After the last attempt: burying messages, and the operators' actions on them."""
