"""A word-level language model as a symbol, in float32, or in float16 with hand-written casts.

Stacked LSTMs as in Zaremba, Sutskever, Vinyals: "Recurrent Neural Network Regularization"
(2014), without dropout. Data and labels are word ids of shape (batch, seq_len); a label is the
next word. Ids are not cast, because float16 represents integers up to 2048 only, so float16 starts
with the weight of the Embedding. The zeros of the LSTM's initial states have the same type.
"""
import mxnet as mx

from .layers import check_dtype, softmax


def get_symbol(num_classes, vocab=None, hidden=200, layers=2, seq_len=35, dtype="float32"):
    """Returns the network with its SoftmaxOutput, of shape (batch * seq_len, num_classes).

    Args:
        num_classes: the number of output words.
        vocab: the number of input words; None: `num_classes`.
        hidden: the size of the Embedding and of each LSTM.
        layers: the number of LSTMs.
        seq_len: the length of a sequence.
        dtype: "float32" or "float16".
    """
    check_dtype(dtype)
    net = mx.sym.Variable("data", shape=(0, seq_len))  # 0: any batch size
    net = mx.sym.Embedding(net, input_dim=vocab or num_classes, output_dim=hidden, dtype=dtype,
                           name="embedding")

    lstm = mx.rnn.FusedRNNCell(hidden, num_layers=layers, mode="lstm", prefix="lstm_")
    net = mx.sym.SwapAxis(net, dim1=0, dim2=1, name="time_first")
    net, _ = lstm.unroll(seq_len, net, lstm.begin_state(dtype=dtype), layout="TNC",
                         merge_outputs=True)
    net = mx.sym.SwapAxis(net, dim1=0, dim2=1, name="batch_first")
    net = mx.sym.Reshape(net, shape=(-1, hidden), name="words")
    net = mx.sym.FullyConnected(net, num_hidden=num_classes, name="fc")

    label = mx.sym.Variable("softmax_label", shape=(0, seq_len))
    label = mx.sym.Reshape(label, shape=(-1,), name="label_words")
    return softmax(net, dtype, label=label)
