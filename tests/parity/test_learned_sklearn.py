"""The learned rule's probabilities are those of scikit-learn's own pipeline."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from layerleap.act.exits.learned import Learned, features
from made_evidence import made


@pytest.mark.parametrize("strength", [0.1, 1.0])
def test_probabilities_are_those_of_scikit_learn(strength):
    train, fresh = made(500, seed=1), made(80, seed=2)
    actual = Learned.train(train, strength=strength).at(0.5).models.probability(fresh)
    for layer in range(1, 6):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        model.fit(features(train)[:, layer].numpy(), train.agrees[:, layer].numpy())
        expected = model.predict_proba(features(fresh)[:, layer].numpy())[:, 1]
        np.testing.assert_allclose(actual[:, layer].numpy(), expected, rtol=0, atol=1e-12)
