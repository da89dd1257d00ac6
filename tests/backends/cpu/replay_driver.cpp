// Repeats recorded kernel calls on the library it is given, for processors that run no Python here.
//
//     replay_driver LIBRARY RECORDED RESULTS
//
// RECORDED, little-endian, everything an int64 unless it says otherwise: the number of calls; each
// call is its op's name (length, bytes), its argument struct (length, bytes), its buffers (number;
// each length, bytes) and its pointers (number; each offset in the struct, buffer, offset in the
// buffer). RESULTS: for each call the status and then all buffers as the call left them. A call
// that writes past the end of a buffer, or an op of another size, ends the run.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr size_t kGuard = 256;
constexpr unsigned char kMark = 0xa5;

[[noreturn]] void fail(const std::string& text) {
    std::fprintf(stderr, "%s\n", text.c_str());
    std::exit(1);
}

struct File {
    std::FILE* handle;
    void read(void* to, size_t bytes) {
        if (std::fread(to, 1, bytes, handle) != bytes) fail("the recorded calls end early");
    }
    int64_t number() {
        int64_t value;
        read(&value, sizeof value);
        return value;
    }
    std::string bytes() {
        std::string text(static_cast<size_t>(number()), '\0');
        read(text.data(), text.size());
        return text;
    }
};

// Memory of exactly the recorded size, with marks behind it.
struct Buffer {
    size_t size;
    unsigned char* data;
    explicit Buffer(const std::string& bytes)
        : size(bytes.size()),
          data(static_cast<unsigned char*>(
              std::aligned_alloc(kGuard, (size / kGuard + 2) * kGuard))) {
        std::memset(data, kMark, (size / kGuard + 2) * kGuard);
        std::memcpy(data, bytes.data(), size);
    }
    bool whole() const {
        for (size_t i = size; i < size + kGuard; ++i)
            if (data[i] != kMark) return false;
        return true;
    }
};

template <class Function>
Function* find(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) fail(std::string("the library has no ") + name);
    return reinterpret_cast<Function*>(found);
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 4) fail("usage: replay_driver LIBRARY RECORDED RESULTS");
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) fail(dlerror());
    auto* use_level = find<int32_t(const char*)>(library, "moestro_use_level");
    auto* set_threads = find<int32_t(int32_t)>(library, "moestro_set_num_threads");
    auto* op_code = find<int32_t(const char*)>(library, "moestro_op_code");
    auto* args_size = find<int64_t(int32_t)>(library, "moestro_args_size");
    auto* launch = find<int32_t(int32_t, const void*)>(library, "moestro_launch");
    auto* last_error = find<const char*()>(library, "moestro_last_error");
    if (use_level("portable") != 0 || set_threads(2) != 0) fail(last_error());

    File in{std::fopen(arguments[2], "rb")};
    std::FILE* out = std::fopen(arguments[3], "wb");
    if (in.handle == nullptr || out == nullptr) fail("a file can't be opened");
    for (int64_t calls = in.number(); calls > 0; --calls) {
        const std::string op = in.bytes();
        std::string args = in.bytes();
        std::vector<Buffer> buffers;
        for (int64_t n = in.number(); n > 0; --n) buffers.emplace_back(in.bytes());
        for (int64_t n = in.number(); n > 0; --n) {
            const int64_t at = in.number(), which = in.number(), offset = in.number();
            const unsigned char* pointer = buffers[static_cast<size_t>(which)].data + offset;
            std::memcpy(args.data() + at, &pointer, sizeof pointer);
        }
        const int32_t code = op_code(op.c_str());
        if (args_size(code) != static_cast<int64_t>(args.size())) fail("another struct: " + op);
        const int64_t status = launch(code, args.data());
        if (status != 0) std::fprintf(stderr, "%s: %s\n", op.c_str(), last_error());
        std::fwrite(&status, sizeof status, 1, out);
        for (const Buffer& buffer : buffers) {
            if (!buffer.whole()) fail(op + " writes past the end of a buffer");
            std::fwrite(buffer.data, 1, buffer.size, out);
            std::free(buffer.data);
        }
    }
    return std::fclose(out);
}
