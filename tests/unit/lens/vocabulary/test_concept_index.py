"""Looking vectors up: neighbours and clusters against brute force, threads, errors."""

import json
import threading

import numpy as np
import pytest
import torch

from concepts import indexed
from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.build import index as build_index
from layerleap.lens.vocabulary.clusters import cluster_names, cluster_vectors, default_number
from layerleap.lens.vocabulary.index import ConceptIndex
from layerleap.lens.vocabulary.neurons import neurons
from layerleap.models.weights import feed_forward
from tiny_models import tiny


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ConceptIndex:
    return indexed(tmp_path_factory.mktemp("index") / "index", "gpt2", clusters=7)


def units(index: ConceptIndex) -> torch.Tensor:
    model = index.transformer
    values = [feed_forward(model, entry.block).values(model) for entry in index.blocks]
    return torch.nn.functional.normalize(torch.cat(values), dim=1)


@pytest.mark.parametrize(("block", "neuron"), [(1, 0), (2, 50), (3, 95)])
def test_neighbours_are_those_of_the_whole_matrix_of_cosines(index, block, neuron):
    all_ = units(index)
    own = index.file.vector(block, neuron)
    cosines = all_ @ all_[own]
    cosines[own] = -2
    order = cosines.argsort(descending=True)[:6].tolist()
    found = index.neighbours(block, neuron, top=6)
    assert [(one.block, one.neuron) for one in found] == [index.file.neuron(i) for i in order]
    assert [one.cosine for one in found] == pytest.approx(cosines[order].tolist(), abs=1e-5)
    first = index.vector(found[0].block, found[0].neuron)
    assert found[0].promotes == tuple(one.token for one in first.promotes[:5])
    assert found[0].suppresses == tuple(one.token for one in first.suppresses[:5])


def test_all_neighbours_can_be_asked_for(index):
    found = index.neighbours(1, 3, top=10**6)
    assert len(found) == index.n_vectors - 1
    assert (1, 3) not in {(one.block, one.neuron) for one in found}


def test_a_zero_vector_has_no_neighbours_and_is_nobodys(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        feed_forward(model, 2).values(model)[5] = 0
    model = type(model).wrap(model.model, model.tokenizer, name="zeroed")
    index = build_index(model, tmp_path / "index", n_texts=0, clusters=4, progress=False)
    with pytest.raises(BadSettings, match=r"L2\.N5 is zero"):
        index.neighbours(2, 5)
    others = {(one.block, one.neuron) for one in index.neighbours(2, 4, top=1000)}
    assert len(others) == index.n_vectors - 2
    assert (2, 5) not in others
    assert index.vector(2, 5).norm == 0
    assert [one.token.id for one in index.vector(2, 5).promotes][:3] == [0, 1, 2]


def test_numbers_and_neurons_are_inverse(index):
    for number in (0, 95, 96, 200, index.n_vectors - 1):
        assert index.file.vector(*index.file.neuron(number)) == number


@pytest.mark.parametrize(
    ("block", "neuron", "message"),
    [
        (0, 0, "block 0 does not exist"),
        (4, 0, "expected 1 to 3"),
        (1, 96, "neurons 0 to 95"),
        (1, -1, "neuron -1 does not exist"),
    ],
)
def test_neurons_that_do_not_exist_are_refused(index, block, neuron, message):
    for ask in (index.vector, index.neighbours):
        with pytest.raises(BadSettings, match=message):
            ask(block, neuron)


def test_arguments_of_the_wrong_kind_are_refused(index):
    for ask in (
        lambda: index.vector("1", 2),
        lambda: index.neighbours(1, 2.5),
        lambda: index.search(7),
        lambda: index.clusters(top="many"),
        lambda: index.cluster(None),
        lambda: index.range(1, "2"),
        lambda: ConceptIndex.open("smollm2"),
    ):
        with pytest.raises(BadSettings, match="expected"):
            ask()


def test_every_vector_is_in_the_cluster_with_the_nearest_centre(index):
    listed = index.clusters(top=100)
    assert [one.size for one in listed] == sorted((one.size for one in listed), reverse=True)
    assert sum(one.size for one in listed) == index.n_vectors
    seen = []
    for one in listed:
        whole = index.cluster(one.number)
        assert len(whole.members) == one.size
        cosines = [member.cosine for member in whole.members]
        assert cosines == sorted(cosines, reverse=True)
        for member in whole.members[:3]:
            assert index.vector(member.block, member.neuron).cluster == one.number
        seen += [(member.block, member.neuron) for member in whole.members]
    assert len(set(seen)) == len(seen) == index.n_vectors


def test_clusters_are_named_by_the_sum_of_their_members_scores(index):
    one = index.clusters(top=1)[0]
    sums: dict[str, dict[int, float]] = {"promotes": {}, "suppresses": {}}
    for member in index.cluster(one.number).members:
        vector = index.vector(member.block, member.neuron)
        for end, tokens in sums.items():
            for scored in getattr(vector, end):
                tokens[scored.token.id] = tokens.get(scored.token.id, 0) + scored.score
    best = sorted(sums["promotes"], key=lambda t: (-sums["promotes"][t], t))[:10]
    assert [scored.token.id for scored in one.promotes] == best
    worst = sorted(sums["suppresses"], key=lambda t: (sums["suppresses"][t], t))[:10]
    assert [scored.token.id for scored in one.suppresses] == worst
    mean = sums["promotes"][best[0]] / one.size
    assert one.promotes[0].score == pytest.approx(mean, rel=2e-3)


def test_the_same_seed_gives_the_same_clusters_and_another_one_others():
    torch.manual_seed(0)
    vectors = torch.randn(3, 200, 16)
    sizes = [200, 200, 200]
    first, again, other = (
        cluster_vectors(lambda b: vectors[b], sizes, 12, seed=seed) for seed in (3, 3, 4)
    )
    assert np.array_equal(first.clusters, again.clusters)
    assert np.array_equal(first.cosines, again.cosines)
    assert not np.array_equal(first.clusters, other.clusters)


def test_vectors_that_point_one_way_share_a_cluster_whatever_their_length():
    torch.manual_seed(1)
    ways = torch.nn.functional.normalize(torch.randn(5, 32), dim=1)
    which = torch.arange(500) % 5
    vectors = (ways[which] + 0.02 * torch.randn(500, 32)) * torch.rand(500, 1).add(0.1) * 9
    found = cluster_vectors(lambda b: vectors.view(2, 250, 32)[b], [250, 250], 12)
    pairs = {
        (way, cluster) for way, cluster in zip(which.tolist(), found.clusters.tolist(), strict=True)
    }
    assert len(pairs) == len({cluster for _, cluster in pairs})  # no cluster has two ways
    assert {way for way, _ in pairs} == set(range(5))
    assert found.cosines.min() > 0.9
    assert default_number(46080) == 1152
    assert default_number(3) == 1


def test_no_cluster_draws_in_everything_where_vectors_are_nearly_orthogonal():
    torch.manual_seed(2)
    vectors = torch.randn(1000, 256)
    found = cluster_vectors(lambda b: vectors, [1000], 25).clusters
    sizes = np.bincount(found, minlength=25)
    assert sizes.max() < 200  # with plain means as centres, most vectors would share one


def test_names_of_clusters_equal_a_plain_sum():
    rng = np.random.default_rng(0)
    clusters = rng.integers(0, 4, 30)
    ids = np.stack([rng.permutation(20)[:6] for _ in range(30)]).astype(np.int32)
    scores = rng.random((30, 6)).astype(np.float16)
    named = cluster_names(clusters, ids, scores)
    for cluster in range(4):
        sums = np.zeros(20)
        for row in np.flatnonzero(clusters == cluster):
            np.add.at(sums, ids[row], scores[row].astype(np.float64))
        order = np.lexsort((np.arange(20), -sums))[:10]
        assert named[cluster].ids.tolist() == order.tolist()
        assert named[cluster].sums == pytest.approx(sums[order])


def test_clusters_are_found_by_the_words_that_name_them(index):
    everyone = index.clusters(top=1000)
    word = next(one.token for one in everyone[0].promotes if one.token.kind == "text")
    found = index.clusters(query=word.text.strip())
    assert everyone[0].number in [one.number for one in found]
    named = [{one.token.id for one in (*c.promotes, *c.suppresses)} for c in found]
    assert all(word.id in tokens for tokens in named)
    several = " ".join(one.token.text for one in everyone[0].promotes if one.token.kind == "text")
    assert index.clusters(query=several)[0].number == everyone[0].number
    assert index.clusters(query="xylophone") == []
    with pytest.raises(BadSettings, match="no cluster 99"):
        index.cluster(99)
    with pytest.raises(BadSettings, match="top is 0"):
        index.clusters(top=0)


def test_results_are_plain_json(index):
    for result in (
        index,
        index.vector(1, 1),
        index.cluster(0),
        index.search("cat"),
        *index.neighbours(1, 1),
        *index.clusters(),
    ):
        json.dumps(result.to_dict(), allow_nan=False)
    assert index.vector(1, 1).to_dict()["range"].keys() == {
        "low",
        "mean",
        "high",
        "std",
        "positive",
    }
    assert len(index.vector(1, 1).to_pandas()) == 16


def test_many_threads_may_ask_at_once(index):
    queries = ["cat dog", "sun moon star", "the", "fish bird*", "house"]
    expected = {query: index.search(query).to_dict() for query in queries}
    vector, near = index.vector(2, 3), index.neighbours(2, 3)
    wrong: list[object] = []

    def ask(offset: int) -> None:
        for turn in range(15):
            query = queries[(turn + offset) % len(queries)]
            if index.search(query).to_dict() != expected[query]:
                wrong.append(query)
            if index.vector(2, 3) != vector or index.neighbours(2, 3) != near:
                wrong.append(turn)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite"])
def test_the_index_and_a_fresh_reading_of_a_vector_agree(name, tmp_path):
    index = indexed(tmp_path / "index", name, n_texts=0, clusters=0)
    for block, neuron in ((1, 4), (3, 39)):
        fresh = neurons(index.transformer).read(block, neuron, top=8)
        kept = index.vector(block, neuron)
        assert kept.norm == pytest.approx(fresh.norm, rel=1e-5)
        for ours, theirs in (
            (kept.promotes, fresh.promotes),
            (kept.suppresses, fresh.suppresses),
        ):
            assert [one.token for one in ours] == [one.token for one in theirs]
            assert [one.score for one in ours] == pytest.approx(
                [one.score for one in theirs], rel=2e-3
            )
