"""The batches of an epoch, dealt to any number of workers so that each counts once."""
