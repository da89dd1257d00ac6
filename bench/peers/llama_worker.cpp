// llama.cpp as a benchmark worker: one JSON command a line in, one JSON answer a line out.
//
//   llama_worker MODEL.gguf --threads 2        the protocol of hf_worker.py
//   llama_worker --quantize IN.gguf OUT.gguf q8_0|q4_0
//
// Built by install.py against the libllama that it times. Defaults are llama-bench's: mapped
// weights, repacked where libllama does so, flash attention when it chooses, ubatches of 512.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "llama.h"

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "llama_worker: %s\n", what.c_str());
    std::exit(1);
}

// The value of a whole number in a flat JSON object; `otherwise` where the key is absent.
int number(const std::string& json, const char* key, int otherwise) {
    const size_t at = json.find("\"" + std::string(key) + "\":");
    return at == std::string::npos ? otherwise : std::atoi(&json[at + std::strlen(key) + 3]);
}

bool asks(const std::string& json, const char* what) {
    return json.find("\"" + std::string(what) + "\"") != std::string::npos;
}

double since(Clock::time_point began) {
    return std::chrono::duration<double>(Clock::now() - began).count();
}

class Worker {
  public:
    Worker(const char* path, int threads) : threads_(threads) {
        llama_model_params params = llama_model_default_params();
        model_ = llama_model_load_from_file(path, params);
        if (model_ == nullptr) fail(std::string("can't load ") + path);
        vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    }

    // Seconds from a prompt to its first token.
    double prefill(int tokens) {
        llama_context* context = context_for(1, tokens + 1);
        const std::vector<llama_token> ids = prompt(tokens, 0);
        const auto began = Clock::now();
        feed(context, ids, 0);
        best(context, -1);
        return since(began);
    }

    // Seconds of greedy steps of a batch, each after an untimed prompt.
    double decode(int batch, int length, int steps) {
        llama_context* context = context_for(batch, length + steps + 1);
        std::vector<llama_token> next(batch);
        for (int s = 0; s < batch; s++) {
            feed(context, prompt(length, s), s);
            next[s] = best(context, -1);
        }
        llama_batch rows = llama_batch_init(batch, 0, 1);
        const auto began = Clock::now();
        for (int step = 0; step < steps; step++) {
            for (int s = 0; s < batch; s++) put(rows, s, next[s], length + step, s, true);
            rows.n_tokens = batch;
            run(context, rows);
            for (int s = 0; s < batch; s++) next[s] = best(context, s);
        }
        const double seconds = since(began);
        llama_batch_free(rows);
        return seconds;
    }

  private:
    static void put(llama_batch& rows, int i, llama_token id, int position, int sequence,
                    bool out) {
        rows.token[i] = id;
        rows.pos[i] = position;
        rows.n_seq_id[i] = 1;
        rows.seq_id[i][0] = sequence;
        rows.logits[i] = out;
    }

    static void run(llama_context* context, const llama_batch& rows) {
        if (llama_decode(context, rows) != 0) fail("llama_decode failed");
        llama_synchronize(context);
    }

    static void feed(llama_context* context, const std::vector<llama_token>& ids, int sequence) {
        const int tokens = static_cast<int>(ids.size());
        llama_batch rows = llama_batch_init(tokens, 0, 1);
        for (int i = 0; i < tokens; i++) put(rows, i, ids[i], i, sequence, i + 1 == tokens);
        rows.n_tokens = tokens;
        run(context, rows);
        llama_batch_free(rows);
    }

    llama_token best(llama_context* context, int row) const {
        const float* logits = llama_get_logits_ith(context, row);
        return static_cast<llama_token>(std::max_element(logits, logits + vocab_) - logits);
    }

    std::vector<llama_token> prompt(int tokens, int sequence) const {
        std::mt19937 draw(tokens * 1000 + sequence);
        std::vector<llama_token> ids(tokens);
        for (llama_token& id : ids) id = 10 + static_cast<llama_token>(draw() % (vocab_ - 10));
        return ids;
    }

    // An empty context of so many sequences of at least so many tokens. One is kept: a longer run
    // of the same measure finds it as the last call left it, and emptied.
    llama_context* context_for(int sequences, int tokens) {
        if (context_ == nullptr || sequences != sequences_ || tokens > tokens_) {
            if (context_ != nullptr) llama_free(context_);
            sequences_ = sequences;
            tokens_ = sequences == 1 ? std::max(tokens, 2304) : (tokens + 255) / 256 * 256;
            llama_context_params params = llama_context_default_params();
            params.n_ctx = static_cast<uint32_t>(sequences_ * tokens_);
            params.n_seq_max = static_cast<uint32_t>(sequences_);
            params.n_batch = 2304;
            params.n_threads = threads_;
            params.n_threads_batch = threads_;
            context_ = llama_init_from_model(model_, params);
            if (context_ == nullptr) fail("can't make a context");
        }
        llama_memory_clear(llama_get_memory(context_), true);
        return context_;
    }

    llama_model* model_ = nullptr;
    llama_context* context_ = nullptr;
    int threads_, vocab_ = 0, sequences_ = 0, tokens_ = 0;
};

int quantize(const char* from, const char* to, const std::string& type) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.pure = true;
    if (type == "q8_0") {
        params.ftype = LLAMA_FTYPE_MOSTLY_Q8_0;
    } else if (type == "q4_0") {
        params.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
    } else {
        fail("unknown type " + type + ": q8_0 or q4_0");
    }
    return static_cast<int>(llama_model_quantize(from, to, &params));
}

void quiet(ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

}  // namespace

int main(int argc, char** argv) {
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    if (argc == 5 && std::strcmp(argv[1], "--quantize") == 0) {
        return quantize(argv[2], argv[3], argv[4]);
    }
    if (argc != 4 || std::strcmp(argv[2], "--threads") != 0) {
        fail("usage: llama_worker MODEL.gguf --threads N");
    }
    Worker worker(argv[1], std::atoi(argv[3]));
    std::cout << R"({"ready": true, "versions": {"llama.cpp": ")" << LLAMA_WORKER_VERSION
              << R"(", "system": ")" << llama_print_system_info() << "\"}}" << std::endl;
    for (std::string line; std::getline(std::cin, line) && !asks(line, "quit");) {
        const double seconds = asks(line, "prefill") ? worker.prefill(number(line, "tokens", 1))
                                                     : worker.decode(number(line, "batch", 1),
                                                                     number(line, "context", 1),
                                                                     number(line, "steps", 1));
        std::cout << "{\"seconds\": " << seconds << "}" << std::endl;
    }
    return 0;
}
