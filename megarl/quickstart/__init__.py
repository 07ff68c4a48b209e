"""The quickstart: models, data and warm-up made on the spot, then the whole job, then a check of its export."""
