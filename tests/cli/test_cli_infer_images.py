"""Pictures as inputs of ``rsrv infer``: layouts, sizes and values, damaged files, and a machine without Pillow."""

import builtins
import sys

import numpy as np
import pytest

from rsrv.cli.infer.images import ImageOptions
from rsrv.cli.infer.sources import read_inputs
from rsrv.client import ModelMetadata, TensorMeta
from rsrv.core.errors import UsageError

RED_LEFT = np.zeros((2, 4, 3), np.uint8)  # height 2, width 4
RED_LEFT[:, :2, 0] = 255
RED_LEFT[1, 3, 2] = 51


def save(path, array, **options):
    from PIL import Image

    Image.fromarray(array).save(path, **options)
    return path


def read(value, datatype, *shape, batch_axis=None, **options):
    model = ModelMetadata("vision", "stub", (TensorMeta("x", datatype, shape, batch_axis),), ())
    return read_inputs([f"x=@{value}"], model, images=ImageOptions(**options)).rows["x"]


def refused(*arguments, **options):
    with pytest.raises(UsageError) as caught:
        read(*arguments, **options)[:]
    return f"{caught.value.message} | {caught.value.hint}"


def test_bytes_go_as_they_are_with_the_channels_where_the_model_has_them(tmp_path):
    path = save(tmp_path / "a.png", RED_LEFT)
    np.testing.assert_array_equal(read(path, "UINT8", -1, 2, 4, 3)[:], RED_LEFT[None])
    np.testing.assert_array_equal(read(path, "UINT8", -1, 3, 2, 4)[:], RED_LEFT.transpose(2, 0, 1)[None])
    np.testing.assert_array_equal(read(path, "INT32", -1, -1, -1, 3)[:], RED_LEFT[None])


def test_floats_are_scaled_to_one_and_normalised_when_told(tmp_path):
    path = save(tmp_path / "a.png", RED_LEFT)
    plain = read(path, "FP32", -1, 3, 2, 4)[:]
    assert plain.dtype == np.float32
    np.testing.assert_allclose(plain[0].transpose(1, 2, 0), RED_LEFT / 255, rtol=1e-6)
    mean, std = (0.5, 0.25, 0.0), (0.5, 1.0, 2.0)
    normal = read(path, "FP32", -1, 2, 4, 3, mean=mean, std=std)[:]
    np.testing.assert_allclose(normal[0], (RED_LEFT / 255 - mean) / std, rtol=1e-6)
    centred = read(path, "FP16", -1, 2, 4, 3, scale=1 / 127.5, mean=(1.0,))[:]
    assert (centred.min(), centred.max()) == (-1, 1)


def test_grey_models_get_grey_pictures_with_and_without_an_axis_of_channels(tmp_path):
    grey = np.arange(8, dtype=np.uint8).reshape(2, 4)
    path = save(tmp_path / "a.png", grey)
    np.testing.assert_array_equal(read(path, "UINT8", -1, 2, 4)[:], grey[None])
    np.testing.assert_array_equal(read(path, "UINT8", -1, 1, 2, 4)[:], grey[None, None])
    np.testing.assert_array_equal(read(path, "UINT8", -1, 2, 4, 3)[:], np.stack([grey] * 3, -1)[None])


def test_pictures_are_scaled_to_what_the_model_wants_or_the_option_says(tmp_path):
    path = save(tmp_path / "a.png", np.full((10, 30, 3), 77, np.uint8))
    assert read(path, "UINT8", -1, 3, 224, 112)[:].shape == (1, 3, 224, 112)
    assert read(path, "UINT8", -1, 3, -1, -1)[:].shape == (1, 3, 10, 30)
    sized = read(path, "UINT8", -1, -1, -1, 3, size=(8, 4))[:]
    assert sized.shape == (1, 4, 8, 3)
    assert (sized == 77).all()
    text = refused(path, "UINT8", -1, 3, 224, 112, size=(224, 112))
    assert "--image-size 224x112 (width and height), where x UINT8[-1,3,224,112] is wanted" in text


def test_a_directory_is_read_in_the_order_of_names_and_a_range_at_a_time(tmp_path):
    for number in (2, 0, 1):
        save(tmp_path / f"{number}.png", np.full((2, 2, 3), number, np.uint8))
    (tmp_path / "notes.txt").write_text("not a picture")
    rows = read(tmp_path, "UINT8", -1, 2, 2, 3)
    assert rows.shape == (3, 2, 2, 3)
    assert rows[1:3][:, 0, 0, 0].tolist() == [1, 2]
    (tmp_path / "1.png").unlink()
    assert rows[0:1][:, 0, 0, 0].tolist() == [0]  # the others were not touched
    by_pattern = read(tmp_path / "[02].png", "UINT8", -1, 2, 2, 3)
    assert by_pattern[:][:, 0, 0, 0].tolist() == [0, 2]


def test_what_a_camera_turned_is_turned_back(tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    path = save(tmp_path / "a.png", RED_LEFT, exif=exif)
    turned = read(path, "UINT8", -1, -1, -1, 3)[:]
    np.testing.assert_array_equal(turned[0], np.rot90(RED_LEFT, -1))


def test_a_model_without_rows_takes_one_picture(tmp_path):
    path = save(tmp_path / "a.png", RED_LEFT)
    np.testing.assert_array_equal(read(path, "UINT8", 2, 4, 3)[:], RED_LEFT)
    save(tmp_path / "b.png", RED_LEFT)
    assert "2 pictures, where one x UINT8[2,4,3] is wanted" in refused(tmp_path, "UINT8", 2, 4, 3)


# --- what does not work -------------------------------------------------------------------------------------------


def test_pictures_of_different_sizes_need_one_to_be_chosen(tmp_path):
    save(tmp_path / "a.png", RED_LEFT)
    save(tmp_path / "b.png", RED_LEFT[:1])
    text = refused(tmp_path, "UINT8", -1, 3, -1, -1)
    assert "b.png is 4x1, but" in text
    assert "--image-size 4x2 scales all" in text
    assert read(tmp_path, "UINT8", -1, 3, -1, -1, size=(4, 2))[:].shape == (2, 3, 2, 4)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", "cut"])
def test_a_damaged_picture_is_named(tmp_path, content):
    good = save(tmp_path / "a.png", RED_LEFT)
    bad = tmp_path / "b.png"
    bad.write_bytes(good.read_bytes()[:45] if content == "cut" else content)
    assert f"input 'x': {bad} is not a picture that can be read" in refused(tmp_path, "UINT8", -1, 2, 4, 3)


def test_a_picture_that_claims_to_be_enormous_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    from PIL import Image

    path = save(tmp_path / "a.png", RED_LEFT)
    for limit in (5, 3):  # above one and above two times the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert "is too large for a picture" in refused(path, "UINT8", -1, 2, 4, 3)


def test_more_than_eight_bits_are_not_cut_off_silently(tmp_path):
    path = save(tmp_path / "a.png", np.full((2, 4), 40_000, np.uint16))
    assert "more than 8 bits a channel" in refused(path, "UINT8", -1, 2, 4, 3)


@pytest.mark.parametrize(
    ("datatype", "shape", "text"),
    [
        ("UINT8", (-1, 5), "x UINT8[-1,5] is not the shape of a picture"),
        ("UINT8", (-1, 7, 8, 9), "is not the shape of a picture"),
        ("INT8", (-1, 2, 4, 3), "values of 0..255, which do not fit x INT8"),
        ("BOOL", (-1, 2, 4, 3), "values of 0..255, which do not fit x BOOL"),
    ],
)
def test_models_that_take_no_pictures_say_so(tmp_path, datatype, shape, text):
    assert text in refused(save(tmp_path / "a.png", RED_LEFT), datatype, *shape)


def test_options_that_do_not_suit_the_model_are_refused(tmp_path):
    path = save(tmp_path / "a.png", RED_LEFT)
    assert "are for floats; wanted x UINT8" in refused(path, "UINT8", -1, 2, 4, 3, scale=0.5)
    assert "--image-mean has 2 numbers for 3 channels" in refused(path, "FP32", -1, 2, 4, 3, mean=(1.0, 2.0))


def test_an_empty_directory_and_a_pattern_of_other_files_are_refused(tmp_path):
    assert "there are no pictures in" in refused(tmp_path, "UINT8", -1, 2, 4, 3)
    (tmp_path / "x.txt").write_text("")
    assert "x.txt', which is no picture" in refused(tmp_path / "*", "UINT8", -1, 2, 4, 3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("x", None, None, None), "--image-size 'x'"),
        (("0", None, None, None), "--image-size '0'"),
        (("1x2x3", None, None, None), "--image-size"),
        ((None, None, "a,b", None), "--image-mean 'a,b'"),
        ((None, None, "nan", None), "--image-mean 'nan'"),
        ((None, None, None, "1,0"), "--image-std 1,0: a standard deviation of 0"),
    ],
)
def test_options_are_parsed_strictly(arguments, text):
    with pytest.raises(UsageError) as caught:
        ImageOptions.parse(*arguments)
    assert text in caught.value.message


def test_options_in_their_forms():
    assert ImageOptions.parse("224", None, None, None).size == (224, 224)
    assert ImageOptions.parse("320x240", 2.0, "1,2,3", "4") == ImageOptions((320, 240), 2.0, (1.0, 2.0, 3.0), (4.0,))


def test_without_pillow_the_line_that_installs_it_is_shown(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"whatever")
    honest = builtins.__import__

    def without(name, *arguments, **options):
        if name.partition(".")[0] == "PIL":
            raise ModuleNotFoundError("No module named 'PIL'", name="PIL")
        return honest(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    text = refused(path, "UINT8", -1, 2, 4, 3)
    assert "Pillow, which reads them, is not installed" in text
    assert "pip install 'rsrv[images]'" in text
