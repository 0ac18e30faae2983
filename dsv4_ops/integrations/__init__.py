"""Run other libraries' models on the ops of this package; nothing else imports these modules."""
