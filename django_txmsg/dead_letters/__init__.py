"""After the last attempt: dead letters, and the operators' actions on them."""
