import pytest

from tfdist.strategies.atomic_files import partial_name, remove_partial, written


def test_a_file_has_its_name_when_it_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    with written(path) as partial:
        partial.write_text("half")
        assert list(tmp_path.iterdir()) == [partial]
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_only_the_previous_file(tmp_path):
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


def test_remove_partial_deletes_leftovers_of_same_file_only(tmp_path):
    path, other = tmp_path / "a[1].txt", tmp_path / "a1.txt"
    left, kept = partial_name(path), partial_name(other)
    for file in (path, left, kept):
        file.touch()
    remove_partial(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, kept])
