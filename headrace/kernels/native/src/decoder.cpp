// Decoder layers in one call: the same kernels in the same order as the modules call them, without what lies between the
// calls, and with one team of threads for all of them.

#include "kernels.h"

namespace headrace {
namespace {

// Structures as Python describes them too.

struct Matrix {
    const void* weights;
    const float* bias;  // Or null.
    int64_t outputs, groups, format;
};

// A layer with a short convolution in place of attention has one of its projections as `qkv`, the other as `o`, and its states as
// `rows`.
struct Layer {
    Matrix qkv, o, gate_up, down;
    const void *input_norm, *post_norm;
    const void *q_norm, *k_norm;  // [width], or both null.
    const float* sinks;            // [heads], or null.
    const void *conv, *conv_bias;  // [channels, taps], [channels]; null for attention, and where there is no bias.
    void* rows;                    // The layer's cache.
    int64_t heads, kv_heads, width, v_width, rotary, window, block_size;
    int64_t block_stride;  // Elements from block to block of `rows`.
    int64_t group;  // Of caches, by which the step's slots and tables are found.
    int64_t taps;
    float input_eps, post_eps, q_eps, k_eps, scale, soft_cap;
};

struct Step {
    const int32_t *starts, *lengths;  // [batch + 1], [batch]
    const int64_t* const* slots;      // A cache group's: [tokens]
    const int32_t* const* tables;     // A cache group's: [batch, table width]
    const int64_t* table_widths;      // A cache group's
    const float* const* angles;       // A layer's: [tokens, rotary], or null for one that does not rotate
    const StateRows* states;          // Or null.
    int64_t batch, tokens;
};

struct Runner {
    const Step& step;
    int64_t hidden;
    int type;

    char* at(void* base, int64_t element) const {
        return static_cast<char*>(base) + element * int64_t(type == FLOAT32 ? sizeof(float) : sizeof(bf16));
    }

    void product(const Matrix& m, const void* x, void* y) const {
        headrace_matmul(x, type, m.groups * 32, m.weights, m.bias, y, type, step.tokens, m.outputs, m.groups, int(m.format));
    }

    // q, k and v in `wide` -> what attention makes of them, in `wide`.
    void attend(const Layer& l, const float* angles, void* wide, void* narrow) const {
        int64_t stride = l.qkv.outputs, q_size = l.heads * l.width, k_size = l.kv_heads * l.width;
        void *k = at(wide, q_size), *v = at(wide, q_size + k_size), *q = narrow;
        if (l.q_norm) norm_heads(wide, stride, l.q_norm, l.q_eps, step.tokens, l.heads, l.width, type);
        if (l.k_norm) norm_heads(k, stride, l.k_norm, l.k_eps, step.tokens, l.kv_heads, l.width, type);
        headrace_rotate_and_write(wide, stride, k, stride, v, stride, angles, step.slots[l.group], l.rows, q, step.tokens,
                                  l.heads, l.kv_heads, l.width, l.v_width, l.rotary, l.block_size, l.block_stride, type);
        headrace_attention(q, q_size, l.rows, step.tables[l.group], step.starts, step.lengths, l.sinks, wide, step.batch,
                           step.tokens, l.heads, l.kv_heads, l.width, l.v_width, l.width + l.v_width, l.block_size, l.block_stride,
                           step.table_widths[l.group], l.scale, l.soft_cap, l.window, type);
    }

    // The same of the three parts of a convolution's input, in `narrow`.
    void convolve(const Layer& l, const void* wide, void* narrow) const {
        int64_t stride = l.qkv.outputs;
        headrace_causal_conv(wide, l.conv, l.conv_bias, l.rows, narrow, step.states, stride / 3, l.taps, stride, l.block_stride,
                             1, 0, type);
    }

    // x is what the layer before added to the stream, and then what this one adds. The first layer has only the stream.
    void layer(const Layer& l, const float* angles, bool first, void* stream, void* x, void* wide, void* narrow) const {
        if (first)
            headrace_rms_norm(stream, l.input_norm, l.input_eps, x, step.tokens, hidden, type);
        else
            headrace_add_rms_norm(x, stream, l.input_norm, l.input_eps, x, stream, step.tokens, hidden, type);
        product(l.qkv, x, wide);
        if (l.conv) {
            convolve(l, wide, narrow);
            product(l.o, narrow, x);
        } else {
            attend(l, angles, wide, narrow);
            product(l.o, wide, x);
        }
        headrace_add_rms_norm(x, stream, l.post_norm, l.post_eps, x, stream, step.tokens, hidden, type);
        product(l.gate_up, x, wide);
        headrace_silu_mul(wide, narrow, step.tokens, l.gate_up.outputs / 2, type);
        product(l.down, narrow, x);
    }
};

}  // namespace

// stream [tokens, hidden]: the residual stream, changed in place, without what the last layer adds to it, which is x.
// wide and narrow: space, for each token as much as the widest layer needs.
API void headrace_layers(const Layer* layers, int64_t count, const Step* step, void* stream, void* x, void* wide, void* narrow,
                         int64_t hidden, int type) {
    Runner runner{*step, hidden, type};
    with_team([&] {
        for (int64_t i = 0; i < count; ++i) runner.layer(layers[i], step->angles[i], i == 0, stream, x, wide, narrow);
    });
}

}  // namespace headrace
