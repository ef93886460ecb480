"""The class head is scikit-learn's logistic regression."""

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from layerleap.zoo.linear_head import fit_head


def test_the_head_gives_the_probabilities_of_scikit_learns_logistic_regression():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(200, 12, generator=generator, dtype=torch.float64) * 5 + 3
    labels = (states[:, :4] + torch.randn(200, 4, generator=generator)).argmax(-1)
    weight, bias = fit_head(states, labels, 4)
    theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000, tol=1e-10))
    theirs.fit(states.numpy(), labels.numpy())
    fresh = torch.randn(50, 12, generator=generator, dtype=torch.float64) * 5 + 3
    ours = (fresh @ weight.T + bias).softmax(-1)
    expected = torch.tensor(theirs.predict_proba(fresh.numpy()))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
