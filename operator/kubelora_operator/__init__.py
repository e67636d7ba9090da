"""The operator: watches LoraTrainingJobs and reconciles them. It never imports the trainer."""
