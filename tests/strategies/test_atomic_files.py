import pytest

from tfdist.strategies.atomic_files import partial_name, remove_partial, written


def test_a_file_has_its_name_when_it_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    with written(path) as partial:
        partial.write_text("half")
        assert list(tmp_path.iterdir()) == [partial]
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_completed_leaves_nothing_but_the_file_before(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")

    def write():
        with written(path) as partial:
            partial.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "before"


def test_what_others_have_left_of_a_file_is_removed(tmp_path):
    path, other = tmp_path / "a[1].txt", tmp_path / "a1.txt"
    left, kept = partial_name(path), partial_name(other)
    for file in (path, left, kept):
        file.touch()
    remove_partial(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, kept])
