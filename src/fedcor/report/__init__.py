"""From records to numbers (`summary`), and from numbers to text (`tables`)."""
