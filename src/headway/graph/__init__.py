"""What is the model? The program that loss(model, batch) runs, as frozen values."""
