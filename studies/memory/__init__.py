"""One memory for the choice and for the step: our selector and optimiser beside their rivals."""
