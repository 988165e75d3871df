"""Who may be chosen: eligibility, bounds per group of clients, and clients per round over time."""
