"""Attribution: an output's logit split into what each part of a model adds to it."""
