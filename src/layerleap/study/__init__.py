"""Study: the experiments of the papers, one file each: model and data in, tidy tables out."""
