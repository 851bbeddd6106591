"""After the last attempt: burying messages, and what an operator does with them."""
