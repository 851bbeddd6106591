"""`format("txmsg")`: the message log as a Spark data source, without any jar."""
