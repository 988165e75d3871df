"""What is done about clients that err or lie."""
