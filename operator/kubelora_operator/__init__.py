"""The operator: watches LoraTrainingJobs, decides, and acts. It never imports the trainer."""
