"""A trained model outside of its job: what `fleet.save_inference_model` leaves, and exports of it (docs/serving.md)."""
