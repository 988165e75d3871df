"""One round on any engine: decide, screen, aggregate, observe, bill, and the record's line."""
