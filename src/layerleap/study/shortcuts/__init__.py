"""The study of linear shortcuts ("Jump to Conclusions")."""
